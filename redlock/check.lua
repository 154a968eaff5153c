if m[3] ~= '@REPLID@' then
  local id = string.match(redis.call('INFO', 'replication'), 'master_replid:(%x+)')
  if id ~= '@REPLID@' then return redis.error_reply('NOTADMITTED restarted or promoted since it was admitted') end
  --[[REMEMBER]]
end
