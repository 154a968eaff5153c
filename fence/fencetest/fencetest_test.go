package fencetest_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
)

func TestMemory(t *testing.T) {
	fencetest.Run(t, fencetest.Harness{
		New:    func(testing.TB) fence.Guard { return new(fence.Memory) },
		Reopen: func(_ testing.TB, g fence.Guard) fence.Guard { return g },
	})
}
