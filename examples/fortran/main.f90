! A Fortran program hands its communicator and a field to Python, which writes them:  sh examples/fortran/run.sh out.zarr
program heat
  use mpi
  use iso_c_binding, only: c_int, c_double
  implicit none
  interface
    integer(c_int) function put_record(comm, start, stop, nx, t, field) bind(c)
      import :: c_int, c_double
      integer(c_int), value :: comm, start, stop, nx
      real(c_double), value :: t
      real(c_double), intent(in) :: field(*)
    end function
    integer(c_int) function end_output() bind(c)
      import :: c_int
    end function
  end interface
  integer, parameter :: nx = 96, ny = 64
  integer :: rank, n_ranks, start, stop, step, i, j, ierr
  real(c_double), allocatable :: field(:, :)  ! x runs fastest, so Python sees field[y, x]
  call MPI_Init(ierr)
  call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
  call MPI_Comm_size(MPI_COMM_WORLD, n_ranks, ierr)
  start = rank * ny / n_ranks
  stop = (rank + 1) * ny / n_ranks
  allocate (field(nx, start:stop - 1))
  do step = 1, 5
    do j = start, stop - 1
      field(:, j) = [(1000.0d0 * step + nx * j + i, i = 0, nx - 1)]
    end do
    if (put_record(MPI_COMM_WORLD, start, stop, nx, dble(step), field) /= 0) call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
  end do
  if (end_output() /= 0) call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
  call MPI_Finalize(ierr)
end program
