-- INSPECT: whose vote a node has. Changes nothing.
-- A replica is no node: it may be behind, and hides expired votes by its own clock.
-- KEYS vote
local info = redis.pcall('INFO', 'replication') -- its right may be missing, with TrustRestarts
if type(info) == 'string' and string.find(info, 'role:slave', 1, true) then
  return redis.error_reply('READONLY a replica, which may be behind; a node must be a primary')
end
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local cur = redis.pcall('GET', KEYS[1])
if not cur then return {'NONE', now} end
if type(cur) == 'string' then return {'BUSY', now, cur, redis.call('PTTL', KEYS[1])} end
if string.find(cur.err, 'WRONGTYPE', 1, true) then
  local kind = redis.pcall('TYPE', KEYS[1])
  return {'OTHER', now, kind.ok or 'value of another kind'}
end
return cur
