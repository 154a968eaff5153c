-- KEEP of docs/protocol.md 1.2: extend. Never gives a vote (rule U), never touches the mark.
-- KEYS vote; ARGV owner, ttl in ms
-- Answers KEPT by the node's clock alone, in us.
local cur = redis.call('GET', KEYS[1])
if cur == ARGV[1] then
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then -- rule G
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local info = redis.pcall('INFO', 'replication') -- its right may be missing, with TrustRestarts
if type(info) == 'string' and string.find(info, 'role:slave', 1, true) then
  return redis.error_reply('READONLY a replica, which may be behind; a node must be a primary')
end
if cur then return {'BUSY', string.sub(cur, 1, 256), redis.call('PTTL', KEYS[1])} end
return {'NONE'}
