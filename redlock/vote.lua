-- VOTE of docs/protocol.md 1.2: acquire, and heal a node that has lost the vote.
-- KEYS vote, mark [, {holdfast}:checked]
-- ARGV owner, ttl in ms, stamp in us
-- Answers OK by the node's clock alone, in us; anything else by its name, the mark and the clock.
-- Admitted for replication id @REPLID@, check @CHECK@, longest ttl @MAXTTL@ ms.
local m = redis.call('MGET', unpack(KEYS))
--[[CHECK]]
local owner, ttl, S = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if ttl > @MAXTTL@ then return redis.error_reply('MAXTTL ttl is longer than @MAXTTL@ ms') end
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local cur = m[1]
local f = math.max(tonumber(m[2] or '0'), now - @MARGIN@)
if cur and cur ~= owner then
  return {'BUSY', f, now, cur, redis.call('PTTL', KEYS[1])}
end
if cur and redis.call('PTTL', KEYS[1]) < ttl then
  redis.call('PEXPIRE', KEYS[1], ttl) -- never shortens; before the mark, so that OOM cannot stop it
end
local why
if S > now + @AHEAD@ then
  why = 'AHEAD'
elseif S > f then
  if not cur and not redis.call('SET', KEYS[1], owner, 'PX', ttl, 'NX') then
    return redis.error_reply('WRONGTYPE the key holds another kind of value') -- MGET hides it
  end
  redis.call('SET', KEYS[2], ARGV[3], 'PX', @LIFE@) -- as it came: a Lua number would be rounded when printed
  return now -- OK
elseif cur and m[2] and S == tonumber(m[2]) then
  return now -- OK: a retransmission
else
  why = 'LOW'
end
if cur then why = 'KEPT' end
return {why, f, now}
