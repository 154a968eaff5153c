-- VOTE of docs/protocol.md 1.2: acquire, and heal a node that has lost the vote.
-- KEYS vote, mark [, queue: where the claim waits and may be parked]
-- ARGV owner, ttl in ms, stamp in us [, the claim's birth in us]
-- Answers OK by the node's clock alone, in us; anything else by its name, the mark and the clock.
-- Admitted for replication id @REPLID@, check @CHECK@, longest ttl @MAXTTL@ ms.
-- Texts are handed on as they came: Redis prints numbers slowly, and rounded.
-- Every lock waits for this: sums turn texts into numbers, and no global is looked up twice.
local call, vote, mark = redis.call, KEYS[1], KEYS[2]
local owner, px, stamp = ARGV[1], ARGV[2], ARGV[3]
local m = call('MGET', vote, mark--[[CHECKED]])
--[[CHECK]]
local ttl, S = px + 0, stamp + 0
if ttl > @MAXTTL@ then return redis.error_reply('MAXTTL ttl is longer than @MAXTTL@ ms') end
local t = call('TIME')
local now = t[1] * 1000000 + t[2]
local cur, F = m[1], (m[2] or 0) + 0
local f = now - @MARGIN@ -- rule R
if F > f then f = F end
if cur and cur ~= owner then
  local rank, queue, fresh = -1, KEYS[3], false
  if queue then -- a place is a hint: where memory is short, or the key taken, there is none
    local pcall = redis.pcall
    if f < S and S <= now + @AHEAD@ then
      local birth = ARGV[4]
      if birth + 0 > now then birth = string.format('%.0f', now) end
      fresh = pcall('ZADD', queue, 'NX', birth, owner) == 1
    end
    rank = pcall('ZRANK', queue, owner)
    if type(rank) ~= 'number' then rank = -1 end
    -- Whoever waits for a second asks again, and then prolongs its life; so does who begins it.
    if rank == 0 or rank > 0 and not fresh then pcall('PEXPIRE', queue, '@QUEUELIFE@') end
  end
  return {'BUSY', f, now, string.sub(cur, 1, 256), call('PTTL', vote), rank} -- owners are shorter; data may be long
end
if cur and call('PTTL', vote) < ttl then -- rule G
  call('PEXPIRE', vote, px) -- never shortens; before the mark, so that OOM cannot stop it
end
local why
if S > now + @AHEAD@ then -- rule Q
  why = 'AHEAD'
elseif S > f then -- rule J
  if not cur and not call('SET', vote, owner, 'PX', px, 'NX') then
    return redis.error_reply('WRONGTYPE the key holds another kind of value') -- MGET hides it
  end
  call('SET', mark, stamp, 'PX', '@LIFE@')
  return now -- OK
elseif cur and S == F then
  return now -- OK: a retransmission, or a reservation of just this stamp
else -- rule K: no vote
  why = 'LOW'
end
if cur then why = 'KEPT' end
return {why, f, now}
