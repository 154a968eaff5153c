-- Whether the user of this connection may do what a queue needs: the first refusal, or OK.
-- KEYS a key of its own; ARGV channel
local pcall, key = redis.pcall, KEYS[1]
local failed
local function check(r) if type(r) == 'table' and r.err then failed = failed or r end end
check(pcall('ZADD', key, 'NX', '1', 'probe'))
check(pcall('PEXPIRE', key, 1000))
check(pcall('ZRANK', key, 'probe'))
check(pcall('ZSCORE', key, 'probe'))
check(pcall('ZRANGE', key, 0, 0, 'WITHSCORES'))
check(pcall('ZREM', key, 'nobody'))
check(pcall('ZPOPMIN', key))
check(pcall('PUBLISH', ARGV[1], 'probe'))
return failed or 'OK'
