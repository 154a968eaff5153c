package store

// Prompt is implemented by a store whose calls return by themselves, whatever the client
// underneath does: Wait of its claims at once when its context is done; Try, Extend and Release
// within half a second after that, and Try and Release also under a context without an end,
// within a few seconds. A Locker then makes the calls of Acquire and Release in the caller's
// goroutine, so that nothing stands between a wake-up and the waiter.
// Those of any other store it races with a goroutine of its own, which can cost more than the
// calls of a store nearby. A wrapper that may hang must not promote the method.
type Prompt interface {
	Prompt()
}
