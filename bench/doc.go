// Package bench compares: stores with each other and with other libraries, and healthy nodes
// with failing ones. It is never tagged.
package bench
