-- Tokens are decimal texts: a script's numbers are doubles, which have no 2^53+1.
local function less(a, b) return #a < #b or #a == #b and a < b end
local function token(s) return string.find(s, '^[1-9][0-9]*$') and not less('9223372036854775807', s) end
local function refuse(why, text) return redis.error_reply('FENCE ' .. why .. ' ' .. string.gsub(string.sub(text, 1, 300), '%c', '?')) end
local function failed(r)
  if type(r) ~= 'table' or not r.err then return nil end
  if string.find(r.err, 'WRONGTYPE', 1, true) then return refuse('type', r.err) end
  return refuse('refused', r.err)
end
