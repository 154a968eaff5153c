package store

// Prompt is implemented by a store whose calls return by themselves, whatever the client
// underneath does: Try, Extend, Wait and Release of its claims within half a second after their
// context is done, and Try and Release also under a context without an end, within a few
// seconds. A Locker then makes the calls of Acquire and Release in the caller's goroutine.
// Those of any other store it races with a goroutine of its own, which can cost more than the
// calls of a store nearby. A wrapper that may hang must not promote the method.
type Prompt interface {
	Prompt()
}
