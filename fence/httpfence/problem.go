package httpfence

import "net/http"

// WriteError answers a request with what a guard said, as problem+json (RFC 9457).
func WriteError(w http.ResponseWriter, err error) bool { return false }

// ReadError returns the error that [WriteError] wrote into the response.
func ReadError(resp *http.Response) error { return nil }
