-- KEYS key; ARGV field, value, ...
-- In parts, since Lua unpacks a few thousand values at the most.
for i = 1, #ARGV, 1000 do
  local r = redis.pcall('HSET', KEYS[1], unpack(ARGV, i, math.min(i + 999, #ARGV)))
  if type(r) == 'table' and r.err then return r end
end
return 1
