-- The new value, as text: a number would come back as a double. KEYS key; ARGV increment
local r = redis.pcall('INCRBY', KEYS[1], ARGV[1])
if type(r) == 'table' and r.err then return r end
return redis.call('GET', KEYS[1])
