package clock

import (
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const clockBoottime = 7 // CLOCK_BOOTTIME of linux/time.h

// bootAt reads CLOCK_BOOTTIME, which counts suspend, right after now was read. It asks the kernel only where it must:
// Go reads the wall clock and its monotonic one without a system call. While these two stand to
// each other as they did when the kernel was last asked, the machine has not slept, since sleep
// moves the wall clock alone. Steps of the wall clock only make it ask again.
func bootAt(now time.Time) time.Duration {
	mono := now.Sub(reference)
	apart := time.Duration(now.UnixNano()) - mono
	if k := known.Load(); k != nil && (apart-k.wall).Abs() < time.Millisecond && mono-k.at < time.Second {
		return mono + k.boot
	}
	boot := bootClock()
	if after := time.Since(reference); after-mono < 50*time.Microsecond { // else it was preempted in between
		known.Store(&clocks{at: mono, wall: apart, boot: boot - after})
	}
	return boot
}

// clocks says how much the wall clock and the boot clock were ahead of Go's monotonic one.
type clocks struct{ at, wall, boot time.Duration }

var (
	reference = time.Now()
	known     atomic.Pointer[clocks]
)

// bootClock asks the kernel. Kernels have had the clock since 2.6.39; the call cannot fail
// there.
func bootClock() time.Duration {
	var ts syscall.Timespec
	if _, _, errno := syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, clockBoottime, uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return time.Duration(time.Now().UnixNano())
	}
	return time.Duration(ts.Nano())
}

// BootID names the boot that the boot clock counts from. Readings of one boot are
// comparable between the processes of the machine; a time namespace has readings of its
// own, so its offset is part of the name.
func BootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	name := strings.TrimSpace(string(id))
	if name == "" {
		return "", errors.New("the kernel tells no boot id")
	}
	if offsets, err := os.ReadFile("/proc/self/timens_offsets"); err == nil {
		for line := range strings.Lines(string(offsets)) {
			f := strings.Fields(line)
			if len(f) == 3 && f[0] == "boottime" && (f[1] != "0" || f[2] != "0") {
				name += "+" + f[1] + "." + f[2]
			}
		}
	}
	return name, nil
}
