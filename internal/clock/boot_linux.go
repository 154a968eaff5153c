package clock

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

const clockBoottime = 7 // CLOCK_BOOTTIME of linux/time.h

// bootNow reads CLOCK_BOOTTIME, which counts suspend. Kernels have had it since 2.6.39;
// the call cannot fail there.
func bootNow() time.Duration {
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
