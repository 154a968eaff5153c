module github.com/holdfast-go/holdfast/bench

go 1.25

require github.com/holdfast-go/holdfast v0.0.0

replace github.com/holdfast-go/holdfast => ..
