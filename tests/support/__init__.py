"""What tests need: ranks as threads, real MPI jobs, waiting."""
