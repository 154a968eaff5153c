-- RELEASE of docs/protocol.md 1.2.
-- KEYS vote [, mark [, queue]]
-- ARGV owner, stamp (0: the mark is known to stand there)
--      [, leave (1: the owner may have a place in the queue), reserve in ms (0: hand nothing over)
--      [, next owner of the claim, its stamp, the claim's birth in us]]
-- Answers 1 where the vote was deleted, and 2 more where next has a place; or {'AHEAD', the same, clock}.
-- A deletion is never refused for want of memory; whatever else fails, the vote is gone.
local pcall, vote, mark, queue, owner = redis.pcall, KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local stamp, leave, reserve, next = ARGV[2], ARGV[3] == '1', ARGV[4] or '0', ARGV[5]
local cur = pcall('GET', vote)
if type(cur) == 'table' and not string.find(cur.err, 'WRONGTYPE', 1, true) then return cur end
local freed = cur == ARGV[1] -- rule D; the key may also hold another kind of value by now
if freed and stamp == '0' and not leave and not next and (reserve == '0' or pcall('EXISTS', queue) == 0) then
  return redis.call('DEL', vote)
end
if leave then pcall('ZREM', queue, owner) end

local now, F, failed
local function write(stamp) -- raises the mark, and reports whether it could
  local r = pcall('SET', mark, stamp, 'PX', @LIFE@)
  if type(r) == 'table' and r.err then failed = r; return false end
  F = tonumber(stamp)
  return true
end
local function clock() -- once, and only where it is needed
  if now then return end
  local t = redis.call('TIME')
  now = t[1] * 1000000 + t[2]
  local m = pcall('GET', mark)
  if type(m) == 'table' then failed, m = m, '0' end
  F = tonumber(m or '0')
end
local function f() return math.max(F, now - @MARGIN@) end
-- Tells a waiter's process, and reports whether it lives. Where that is not allowed, nobody lives.
local function tell(w, text)
  local n = pcall('PUBLISH', 'holdfast:' .. (string.match(w, '^h1%.%d+%.(%x+)%.') or ''), text)
  return type(n) == 'number' and n > 0
end
local function lowest(...)
  local low = pcall(...)
  if low.err then return end
  return low[1], tonumber(low[2])
end

-- Reserves the vote for the first live waiter, and reports whether that was done.
local function handOver()
  local w = lowest('ZPOPMIN', queue)
  while w do
    clock()
    if tell(w, string.format('w1 wake %.0f %s %s %s', f(), w, owner, vote)) then break end
    w = lowest('ZPOPMIN', queue)
  end
  if not w then return false end
  local s = f() + 1 -- an acceptance like any other, in the waiter's name
  if s > now + @AHEAD@ or not write(string.format('%.0f', s)) then return false end -- rule H
  local r = pcall('SET', vote, w, 'PX', reserve)
  return not r.err
end
-- Who is next in line by now, and has waited for so long that its timers are slow, learns when the reservation ends.
local function tellNext()
  local w, since = lowest('ZRANGE', queue, 0, 0, 'WITHSCORES')
  while w and now - since > 1000000 and not tell(w, string.format('w1 next %s %s %s', reserve, w, vote)) do
    pcall('ZREM', queue, w)
    w, since = lowest('ZRANGE', queue, 0, 0, 'WITHSCORES')
  end
end

local S, early = tonumber(stamp), false
if S > 0 then
  clock()
  early = S > now + @AHEAD@ -- rule Q: no tombstone yet
  if not early and S > f() then write(stamp) end -- rule M, a tombstone: every late VOTE of this owner is LOW
end
local answer = freed and 1 or 0
if next then
  clock()
  local S2, birth = tonumber(ARGV[6]), ARGV[7]
  if S2 > f() and S2 <= now + @AHEAD@ then
    if tonumber(birth) > now then birth = string.format('%.0f', now) end
    pcall('ZADD', queue, 'NX', birth, next)
    pcall('PEXPIRE', queue, @QUEUELIFE@)
    if type(pcall('ZSCORE', queue, next)) == 'string' then answer = answer + 2 end
  end
end
if freed then
  if reserve ~= '0' and handOver() then
    tellNext()
  else
    redis.call('DEL', vote)
  end
elseif S == 0 then
  local info = pcall('INFO', 'replication')
  if type(info) == 'string' and string.find(info, 'role:slave', 1, true) then
    return redis.error_reply('READONLY a replica, which may be behind; a node must be a primary')
  end
end
if failed then return failed end
if early then return {'AHEAD', answer, now} end
return answer
