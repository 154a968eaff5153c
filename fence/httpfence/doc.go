// Package httpfence makes fencing tokens count at a service over HTTP.
package httpfence
