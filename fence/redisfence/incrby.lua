-- The new value, as text: a number would come back as a double. KEYS key; ARGV increment
-- Reads first, so that nothing is written where that is not allowed.
local r = redis.pcall('GET', KEYS[1])
if type(r) ~= 'table' or not r.err then r = redis.pcall('INCRBY', KEYS[1], ARGV[1]) end
if type(r) == 'table' and r.err then
  --[[UNDO]]
  return r
end
return redis.call('GET', KEYS[1])
