//go:build !unix

package kit

import "time"

// CPU is the processor time that this process has used, or zero where that is not known.
func CPU() time.Duration { return 0 }
