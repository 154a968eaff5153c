// Package breaks tests what an operator does to locks: looking, listing, and breaking them,
// on real servers.
package breaks
