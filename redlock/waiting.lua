-- WAITING: who has a place in the queue of a vote. Changes nothing.
-- KEYS queue: no other, so that it can be asked for on any server, and what is wrong with it is
--      its own
-- ARGV how many of the first to name
-- Answers how many there are, then owner and birth in us of each that is named.
local n = tonumber(ARGV[1])
local all = n > 0 and redis.call('ZRANGE', KEYS[1], 0, n - 1, 'WITHSCORES') or {}
for i = 1, #all, 2 do all[i] = string.sub(all[i], 1, 256) end -- owners are shorter; other data may be long
table.insert(all, 1, redis.call('ZCARD', KEYS[1]))
return all
