-- Comes before every write: refuses a token below the mark, or raises the mark.
-- Takes what is its own from the ends of KEYS (mark) and ARGV (token), so that what follows
-- finds its own there. All in one line, so that the lines of what follows keep their numbers.
do
  --[[TOKEN]]
  local mark, t = table.remove(KEYS), table.remove(ARGV)
  local seen = redis.pcall('GET', mark)
  local bad = failed(seen)
  if bad then return bad end
  if seen and not token(seen) then return refuse('mark', seen) end
  if seen and less(t, seen) then return refuse('stale', seen) end
  --[[VOTES]]
  if seen ~= t then
    bad = failed(redis.pcall('SET', mark, t))
  elseif @PROBE@ then
    bad = failed(redis.pcall('SET', mark, t, 'NX'))
  end
  if bad then return bad end
  --[[SEQ]]
end
