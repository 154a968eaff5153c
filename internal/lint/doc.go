// Package lint holds the rules of the repository as tests: what may depend on what,
// and how the modules are joined.
package lint
