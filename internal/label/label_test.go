package label

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

func TestBrokenBy(t *testing.T) {
	pid := fmt.Sprintf(":%d", os.Getpid())
	if p := Process(); !strings.HasSuffix(p, pid) || len(p) == len(pid) {
		t.Errorf("Process is %q", p)
	}
	for _, host := range []string{"", "db1", strings.Repeat("x", 60), strings.Repeat("x", 255)} {
		b := brokenBy(host + pid)
		if len(b) > 60 || !strings.HasPrefix(b, "broken by "+host[:min(len(host), 30)]) || !strings.HasSuffix(b, pid) {
			t.Errorf("of %q it is %q", host, b)
		}
	}
}
