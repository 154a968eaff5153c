-- RELEASE of docs/protocol.md 1.2.
-- KEYS vote [, mark]
-- ARGV owner, stamp (0: the mark is known to stand there, and is not named)
-- Answers by how many votes were deleted: 1 or 0.
local freed = 0
local cur = redis.pcall('GET', KEYS[1])
if type(cur) == 'table' and not string.find(cur.err, 'WRONGTYPE', 1, true) then return cur end
if cur == ARGV[1] then -- the key may also hold another kind of value by now
  redis.call('DEL', KEYS[1]) -- first: a deletion is never refused for want of memory
  freed = 1
end
if ARGV[2] == '0' then
  local info = freed == 0 and redis.pcall('INFO', 'replication')
  if type(info) == 'string' and string.find(info, 'role:slave', 1, true) then
    return redis.error_reply('READONLY a replica, which may be behind; a node must be a primary')
  end
  return freed
end
local S, t = tonumber(ARGV[2]), redis.call('TIME')
local now = t[1] * 1000000 + t[2]
if S > now + @AHEAD@ then return {'AHEAD', freed, now} end -- no tombstone yet
if S > math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), now - @MARGIN@) then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', @LIFE@) -- tombstone: every late VOTE of this owner is LOW
end
return freed
