// Kernels include this for their element types; types.h has them here.
