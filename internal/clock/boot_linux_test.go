package clock

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The boot clock is the one that the kernel tells as its uptime, which counts suspend.
func TestBootClockIsUptime(t *testing.T) {
	uptime := func() time.Duration {
		text, err := os.ReadFile("/proc/uptime")
		if err != nil {
			t.Fatal(err)
		}
		s, err := strconv.ParseFloat(strings.Fields(string(text))[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(s * float64(time.Second))
	}
	const unit = 10 * time.Millisecond // of uptime
	before, now, after := uptime(), bootAt(time.Now()), uptime()
	if now < before-unit || now > after+unit {
		t.Errorf("the boot clock reads %v, uptime %v before and %v after", now, before, after)
	}
}

func TestBootID(t *testing.T) {
	id, err := BootID()
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`\A[0-9a-f-]{36}(\+-?\d+\.-?\d+)?\z`).MatchString(id) {
		t.Errorf("the boot id is %q", id)
	}
	if again, err := BootID(); err != nil || again != id {
		t.Errorf("the boot id is %q, and then %q, %v", id, again, err)
	}
}
