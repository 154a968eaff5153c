// Package sqltext writes values into statements, where parameters would cost a round trip more.
package sqltext

import "fmt"

// Binary is s as a literal of MySQL, of bytes that no character set and no escape changes.
func Binary(s string) string { return fmt.Sprintf("X'%x'", s) }
