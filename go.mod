module github.com/holdfast-go/holdfast

go 1.25
