package redlock

import "github.com/holdfast-go/holdfast/store"

var _ store.Prompt = (*Store)(nil)

// Prompt implements [store.Prompt]: a call waits for no node longer than the node timeout.
func (*Store) Prompt() {}
