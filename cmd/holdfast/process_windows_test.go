package main

import (
	"os/exec"
	"testing"
	"time"
	"unsafe"
)

// The system checks the size of what it fills in.
func TestJobAccounting(t *testing.T) {
	if size := unsafe.Sizeof(jobAccounting{}); size != 48 {
		t.Errorf("%d bytes, want 48", size)
	}
}

// What the command has started ends with the job.
func TestJob(t *testing.T) {
	c, err := start(exec.Command("cmd", "/c", "start /b ping -n 60 127.0.0.1 >NUL & exit 7"), supervision{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if code := c.wait(); code != 7 {
		t.Errorf("exit code %d, want 7", code)
	}
	if !c.remains() {
		t.Fatal("the command's own child is not in the job")
	}
	c.kill()
	for range 1000 {
		if !c.remains() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the job does not end")
}
