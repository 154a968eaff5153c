// Package servertest starts real servers for tests as child processes on loopback, and
// puts faults between them and their clients: a TCP proxy, pauses, kills, restarts, older
// copies of the data, and a clock that can be set.
//
// It is unstable: it serves this project's own tests and may change with any release. The
// library never imports it.
//
// Everything that it starts is ended when the test ends, also when the test fails, and on
// Linux also when the test process is killed. A missing program fails the test where the
// environment says CI=true or names it in HOLDFAST_REQUIRE, and skips it elsewhere.
//
// Methods that cannot do their work fail the test at once, unless they return an error.
package servertest
