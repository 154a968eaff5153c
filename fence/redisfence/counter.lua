-- The next number, as text. KEYS counter
--[[TOKEN]]
local last = redis.pcall('GET', KEYS[1])
local bad = failed(last)
if bad then return bad end
if last and last ~= '0' and not token(last) then return refuse('mark', last) end
if last == '9223372036854775807' then return refuse('last', last) end
bad = failed(redis.pcall('INCR', KEYS[1]))
if bad then return bad end
return redis.call('GET', KEYS[1])
