-- KEYS key, ...
for i = 1, #KEYS, 1000 do
  local r = redis.pcall('DEL', unpack(KEYS, i, math.min(i + 999, #KEYS)))
  if type(r) == 'table' and r.err then return r end
end
return 1
