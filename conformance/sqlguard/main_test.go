// Package sqlguard_test shows on real databases that a write under a guard in SQL never takes
// effect behind a newer holder's, at any isolation level, and that it does without.
package sqlguard_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
)

func TestMain(m *testing.M) { kit.Main(m, nil) }
