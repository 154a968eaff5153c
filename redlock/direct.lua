if --[[ADMITTED]] and pcall('PEXPIREAT', vote, math.floor(now / 1000) + reserve) == 1 then -- by TIME, which the waiter counts from
  what = 'w1 grant ' .. s .. ' ' .. t[1] .. '.' .. t[2] .. ' ' .. reserve .. ' @ID@ '
end
