-- The age in us of a replication id: since a client first saw it on this server.
-- KEYS {holdfast}:promoted; ARGV replication id
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local seen = redis.call('HGET', KEYS[1], ARGV[1])
if seen then return now - seen end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f', now))
return 0
