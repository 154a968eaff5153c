package holdfast_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/memstore"
)

// A lease that is printed shows no owner, and is not read behind the back of what extends it.
func TestLeaseIsPrinted(t *testing.T) {
	locks, err := holdfast.New(memstore.New(), &holdfast.Options{TTL: time.Second, ExtendEvery: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	lease, err := locks.Acquire(context.Background(), "k")
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Release(context.Background())
	for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end); {
		for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
			if text := fmt.Sprintf(format, lease); strings.Contains(text, lease.Owner()) || !strings.Contains(text, "lease on") {
				t.Fatalf("%s: %s", format, text)
			}
		}
		_ = fmt.Sprintf("%v %+v", locks, locks)
	}
}
