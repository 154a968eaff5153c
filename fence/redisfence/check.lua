-- Answers the mark. Where it is the token, a write that changes nothing makes sure that this is
-- no replica, which may be behind.
-- KEYS mark; ARGV token
--[[TOKEN]]
local seen = redis.pcall('GET', KEYS[1])
local bad = failed(seen)
if bad then return bad end
if not seen then return '' end
if not token(seen) then return refuse('mark', seen) end
if seen == ARGV[1] then
  bad = failed(redis.pcall('PERSIST', KEYS[1]))
  if bad then return bad end
end
return seen
