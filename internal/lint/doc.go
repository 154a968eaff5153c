// Package lint holds the rules of the repository as tests: what may depend on what, how
// the modules are joined, and that the tests exist which the documents name.
package lint
