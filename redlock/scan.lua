-- One page of the keys that match a pattern and hold a vote of ours.
-- ARGV cursor, pattern, count
if ARGV[1] == '0' and string.find(redis.call('INFO', 'cluster'), 'cluster_enabled:1', 1, true) then
  return redis.error_reply('ISCLUSTER one server does not have all the keys')
end
local page = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3])
local found = {page[1]}
for _, key in ipairs(page[2]) do
  local v = redis.pcall('GET', key)
  if type(v) == 'string' and string.find(v, '^h1%.%d') then found[#found + 1] = key end
end
return found
