package store

// Prompt is implemented by a store whose calls return by themselves, whatever the client
// underneath does: Try, Extend, Wait and Release of its claims soon after their context is done, and
// Try also under a context without an end, within a bounded time. A Locker then makes the
// calls of Acquire and Release in the caller's goroutine; those of any other store it races
// with a goroutine of its own, which costs more than the calls of a store nearby.
type Prompt interface {
	Prompt()
}
