-- BREAK of docs/protocol.md 1.2: takes the vote from its owner for an operator, whose owner
-- is never released. Deletes nothing (rule U), hands nothing over.
-- KEYS vote, mark
-- ARGV owner, the operator's owner, ttl in ms, ours (1: the owner's vote is none of another
--      library, so what is left of it counts)
local cur = redis.call('GET', KEYS[1])
local f = tonumber(redis.call('GET', KEYS[2]) or '0')
local left = redis.call('PTTL', KEYS[1])
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if cur and cur ~= ARGV[1] and cur ~= ARGV[2] then return {'BUSY', now, cur, left} end
local ttl = tonumber(ARGV[3])
if cur == ARGV[2] or cur and ARGV[4] == '1' then ttl = math.max(ttl, left) end
redis.call('SET', KEYS[1], ARGV[2], 'PX', string.format('%.0f', ttl))
f = math.max(f, now - @MARGIN@) + 1 -- rule R
redis.call('SET', KEYS[2], string.format('%.0f', f), 'PX', @LIFE@)
return {'BROKEN', now}
