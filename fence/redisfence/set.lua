-- KEYS key; ARGV value [, 'PX', ms]
return redis.pcall('SET', KEYS[1], unpack(ARGV))
