package main

import (
	"errors"
	"os"
	"slices"
	"strings"

	"github.com/holdfast-go/holdfast"
)

// A run inside another one must not wait for the key that the other holds: neither would
// ever end. The environment names the leases around a process by their owners, and an
// attempt that one of them refuses is given up at once. An owner is one acquisition of one
// key of one store, so there is nothing else to compare; and one that has ended, as where
// CMD left a daemon behind, refuses nothing.

const (
	ownerVariable  = "HOLDFAST_OWNER"  // of the innermost lease
	ownersVariable = "HOLDFAST_OWNERS" // of all, with spaces between them, the outermost first
)

func outerOwners() []string {
	owners := strings.Fields(os.Getenv(ownersVariable))
	if own := os.Getenv(ownerVariable); own != "" && !slices.Contains(owners, own) {
		owners = append(owners, own)
	}
	return owners
}

// heldAround reports whether err is the refusal by one of the owners.
func heldAround(err error, owners []string) bool {
	held, ok := errors.AsType[*holdfast.HeldError](err)
	return ok && slices.Contains(owners, held.Holder.Owner)
}
