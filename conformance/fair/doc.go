// Package fair shows on real Redis servers what waiting costs, and who is served when.
package fair
