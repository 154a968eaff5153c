-- Within the prologue: takes each step of a token once, in rising order.
-- What follows may give the step back: before is the one that the token took last, or 0.
-- Its own, before the prologue's: KEYS (record: token, step), ARGV (step)
local record, step = table.remove(KEYS), table.remove(ARGV)
local last, before = redis.pcall('GET', record), '0'
bad = failed(last)
if bad then return bad end
if last then
  local lt, lstep = string.match(last, '^([0-9]+) ([0-9]+)$')
  if not lt then return refuse('seq', last) end
  if lt == t and not less(lstep, step) then return refuse('applied', lstep) end
  if lt == t then before = lstep end
end
bad = failed(redis.pcall('SET', record, t .. ' ' .. step))
if bad then return bad end
