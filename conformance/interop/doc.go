// Package interop runs Holdfast beside other libraries on the same keys and nodes.
package interop
