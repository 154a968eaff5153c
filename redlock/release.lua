-- RELEASE of docs/protocol.md 1.2.
-- KEYS vote [, mark [, queue]]
-- ARGV owner, stamp (0: the mark is known to stand there)
--      [, leave (1: the owner may have a place in the queue), reserve in ms (0: hand nothing over),
--       the token of a hand-over [, next owner of the claim, its stamp, the claim's birth in us]]
-- Answers 1 where the vote was deleted, and 2 more where next has a place; or {'AHEAD', the same, clock}.
-- A deletion is never refused for want of memory; whatever else fails, the vote is gone.
-- Every lock waits for the first lines, and every hand-over for the rest: few calls, and numbers are printed once.
local call, pcall, vote = redis.call, redis.pcall, KEYS[1]
local cur, stamp, leave, reserve, next = pcall('GET', vote), ARGV[2], ARGV[3] == '1', ARGV[4] or '0', ARGV[6]
local freed = cur == ARGV[1] -- rule D; the key may also hold another kind of value by now
local w = freed and reserve ~= '0' and not leave and pcall('ZPOPMIN', KEYS[3])[1] -- who waits; none in an error
if freed and stamp == '0' and not leave and not next and not w then return call('DEL', vote) end
if type(cur) == 'table' and not string.find(cur.err, 'WRONGTYPE', 1, true) then return cur end
local mark, queue, owner = KEYS[2], KEYS[3], ARGV[1]
if leave then
  pcall('ZREM', queue, owner)
  w = freed and reserve ~= '0' and pcall('ZPOPMIN', queue)[1]
end

local failed, wrote, early, t, now, f, checked -- f: the mark
if w or next or stamp ~= '0' then
  t = call('TIME')
  now = t[1] * 1000000 + t[2]
  f = now - @MARGIN@
  local F = pcall('GET', mark)
  F = type(F) == 'string' and tonumber(F) or 0
  if F > f then f = F end -- rule R
end
local function raise(s) -- the mark, and reports whether it could
  local r = pcall('SET', mark, s, 'PX', '@LIFE@')
  if r.err then failed = r; return false end
  f, wrote = s + 0, true
  return true
end
if stamp ~= '0' then
  early = stamp + 0 > now + @AHEAD@ -- rule Q: no tombstone yet
  if not early and stamp + 0 > f then raise(stamp) end -- rule M, a tombstone: every late VOTE of this owner is LOW
end
local answer = freed and 1 or 0
if next then
  local s, birth = ARGV[7] + 0, ARGV[8]
  if s > f and s <= now + @AHEAD@ then
    if birth + 0 > now then birth = string.format('%.0f', now) end
    pcall('ZADD', queue, 'NX', birth, next)
    pcall('PEXPIRE', queue, '@QUEUELIFE@')
    if type(pcall('ZSCORE', queue, next)) == 'string' then answer, wrote = answer + 2, true end
  end
end

local function inbox(of) -- h1.BIRTH.INBOX.RANDOM
  local stop = string.find(of, '.', 21, true)
  return 'holdfast:' .. (stop and string.sub(of, 21, stop - 1) or '')
end
-- Answers how many subscribers of a waiter's process this server told; nothing where that is not allowed.
local function tell(channel, what)
  local n = pcall('PUBLISH', channel, what)
  return type(n) == 'number' and n
end
local direct, token = w and @ADMITTED@, ARGV[5] -- direct: what is reserved is a grant
-- Whether a waiter's process lives. PUBLISH tells that too, but too late for a grant: subscribers of a
-- replica hear it, and are not counted.
local function listens(channel)
  local n = pcall('PUBSUB', 'NUMSUB', channel)
  direct = not n.err
  return n[2] ~= 0
end
-- Keeps the vote for a waiter: an acceptance like any other, in the waiter's name. Answers what to tell its
-- process, whether the vote is kept, and whether that is a grant.
local function keep(to)
  local s = token
  if s + 0 <= f or s + 0 > now + @AHEAD@ then s = string.format('%.0f', f + 1) end
  if s + 0 > now + @AHEAD@ or not raise(s) then return string.format('w1 wake %.0f ', f), false end -- rule H
  if pcall('SET', vote, to, 'PX', reserve).err then return 'w1 wake ' .. s .. ' ', false end
  if direct@BYTIME@ then
    return 'w1 grant ' .. s .. ' ' .. t[1] .. '.' .. t[2] .. ' ' .. reserve .. ' @ID@ ', true, true
  end
  return 'w1 wake ' .. s .. ' ', true
end
local function waited(w) return now - (tonumber(string.sub(w, 4, 19)) or 0) > 1000000 end
if freed then
  local kept
  while w do
    local channel = inbox(w)
    if w ~= owner and (not direct or listens(channel)) then
      local what, reserved, granted = keep(w)
      local n = tell(channel, what .. w .. ' ' .. owner .. ' ' .. vote)
      kept = reserved
      if n and (n > 0 or granted) then break end -- what is granted is never given to another
      kept = false
    end
    w = pcall('ZPOPMIN', queue)[1]
  end
  if not kept then call('DEL', vote) end
  -- Who is next in line by now, and has waited for so long that its timers are slow, learns when the reservation ends.
  local n = kept and waited(w) and pcall('ZRANGE', queue, 0, 0)[1]
  while n and waited(n) and (tell(inbox(n), 'w1 next ' .. reserve .. ' ' .. n .. ' ' .. vote) or 0) == 0 do
    if pcall('ZREM', queue, n) ~= 1 then break end -- writes are refused: it would come again for ever
    n = pcall('ZRANGE', queue, 0, 0)[1]
  end
elseif not wrote then -- which a replica would have refused
  local info = pcall('INFO', 'replication')
  if type(info) == 'string' and string.find(info, 'role:slave', 1, true) then
    return redis.error_reply('READONLY a replica, which may be behind; a node must be a primary')
  end
end
if failed then return failed end
if early then return {'AHEAD', answer, now} end
return answer
