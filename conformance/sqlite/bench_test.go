package sqlite

import (
	"context"
	"testing"
	"time"
)

// BenchmarkRefused is a Try of a key that another holds.
func BenchmarkRefused(b *testing.B) {
	s, _ := open(b, lockFile(b))
	ctx := context.Background()
	if _, err := claim(s, "k", time.Hour).Try(ctx); err != nil {
		b.Fatal(err)
	}
	c := claim(s, "k", time.Minute)
	for b.Loop() {
		if _, err := c.Try(ctx); err == nil {
			b.Fatal("granted")
		}
	}
}
