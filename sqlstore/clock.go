package sqlstore

import (
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// wallBoot stands for the boot id where leases end by the wall clock.
const wallBoot = "wall"

// leaseClock is the clock that all processes of the machine share: the time since boot, and
// the name of the boot. Readings of two boots are not comparable.
type leaseClock struct {
	clock.Clock
	boot   string
	offset time.Duration // of this process's time namespace
	wall   bool
}

func newLeaseClock() (leaseClock, error) {
	name, err := clock.BootID()
	switch {
	case err == nil:
		boot, offset := splitBoot(name)
		return leaseClock{boot: boot, offset: offset}, nil
	case runtime.GOOS == "linux":
		// Its processes would take everybody else's leases for those of another boot.
		return leaseClock{}, &store.InvalidError{Field: "system", Rule: "has no boot id; /proc must be mounted"}
	default:
		return leaseClock{boot: wallBoot, wall: true}, nil
	}
}

// splitBoot takes the offset of the time namespace off the name of a boot, so that the
// processes of all its time namespaces share one clock.
func splitBoot(name string) (boot string, offset time.Duration) {
	boot, text, ok := strings.Cut(name, "+")
	if !ok {
		return name, 0
	}
	secs, nanos, _ := strings.Cut(text, ".")
	sec, err1 := strconv.ParseInt(secs, 10, 64)
	nano, err2 := strconv.ParseInt(nanos, 10, 64)
	if err1 != nil || err2 != nil {
		return name, 0
	}
	return boot, time.Duration(sec)*time.Second + time.Duration(nano)
}

// now reads the clock in the time of the machine.
func (c leaseClock) now() time.Duration { return c.Now().Boot() - c.offset }
