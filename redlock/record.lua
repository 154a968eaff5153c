-- The node's record of docs/protocol.md 1.1: written by the first client, compared by all.
-- KEYS {holdfast}:node; ARGV maxttl in ms, trust, write (1: write where there is none)
local r = redis.call('HMGET', KEYS[1], 'maxttl', 'trust')
if r[1] then return {r[1], r[2] or ''} end
if ARGV[3] == '1' then redis.call('HSET', KEYS[1], 'maxttl', ARGV[1], 'trust', ARGV[2]) end
return {ARGV[1], ARGV[2]}
