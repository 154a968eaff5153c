if --[[ADMITTED]] --[[BYTIME]]then
  what = 'w1 grant ' .. s .. ' ' .. t[1] .. '.' .. t[2] .. ' ' .. reserve .. ' @ID@ '
end
